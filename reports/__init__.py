"""What to tell people: reads records and asks the harness; judges nothing itself."""
