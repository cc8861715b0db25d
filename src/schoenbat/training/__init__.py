"""The paper's model, with any attention by name, and the engine that trains it."""
