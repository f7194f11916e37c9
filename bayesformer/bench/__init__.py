"""Honest comparisons: tasks, the runner that fills in missing cells, tables and the report page."""
