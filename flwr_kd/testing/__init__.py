"""Faults and garbage, for tests of this library and of its users."""
