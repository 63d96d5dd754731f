"""A run in the forms that other programs read: one module each, imported when it is asked for."""
