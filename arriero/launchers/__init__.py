"""The `arriero` command, the TorchX component, the entry point of a role and scheduler support."""
