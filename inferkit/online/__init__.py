"""Roles: an HTTP interface in the parent, a loop around the scheduler in every rank."""
