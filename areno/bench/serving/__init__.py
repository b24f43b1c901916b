"""What an OpenAI-compatible server costs."""
