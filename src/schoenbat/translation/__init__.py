"""German into English with a small Transformer, whatever its attention."""
