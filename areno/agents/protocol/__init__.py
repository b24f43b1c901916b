"""What a request of the OpenAI protocol may say: its fields, checked, and the errors of those that are wrong."""
