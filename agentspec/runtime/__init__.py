"""What the rooms above stand on: threads, devices, files, tokens and their text. No room of agentspec is imported."""
