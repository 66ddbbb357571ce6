"""A user's data as tokens: read, rendered and tokenised once, mapped into memory by every rank, and
laid out into steps.
"""
