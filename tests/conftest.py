"""Settings of all tests: no property is held to a time, which on a shared machine says nothing about it."""

from hypothesis import settings

settings.register_profile("highwater", deadline=None)
settings.load_profile("highwater")
