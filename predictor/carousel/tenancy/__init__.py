"""Tenants: who asks, what that one may have, and what is left of it."""
