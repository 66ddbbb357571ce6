"""A user's data as tokens: tokenised once, mapped into memory by ranks, arranged in steps."""
