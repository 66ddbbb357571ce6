"""TRL's trainer as accelerate launches it: its step in closed form, and the edges that its recorded
trials found.
"""
