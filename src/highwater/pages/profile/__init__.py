"""What a memory snapshot says, as text and as a page."""
