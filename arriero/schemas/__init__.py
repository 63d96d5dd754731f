"""Messages, graph specification, configuration and lineage records: data without behaviour."""
