"""What is shipped tuned: `seed/*.jsonl`, and the schema of the database they are read into."""
