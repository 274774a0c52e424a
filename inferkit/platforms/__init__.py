"""Everything that is specific to a device."""
