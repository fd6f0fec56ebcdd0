"""The HTTP server: JSON to requests and results to JSON, before an engine that runs in a process of its own."""
