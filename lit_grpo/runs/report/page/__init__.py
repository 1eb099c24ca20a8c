"""The HTML page of a report: charts, events, completions and an entry for an experiment log."""
