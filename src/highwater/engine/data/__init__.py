"""A user's data as tokens: tokenised once, mapped into memory by ranks, laid out into steps."""
