"""Commands that look at configurations and run directories. Torch-free."""
