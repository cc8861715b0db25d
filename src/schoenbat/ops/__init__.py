"""How the attention is executed, on tensors and ints only."""
