"""From a name, folder or GGUF file to a policy; and from flat tokens to log-probs."""
