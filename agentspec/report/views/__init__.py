"""Views of an agent run. Each is made of ``report.schema.RunRecord`` alone, and none imports another."""
