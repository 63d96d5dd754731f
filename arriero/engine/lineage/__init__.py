"""The record of a run: written while it goes on, asked and audited afterwards."""
