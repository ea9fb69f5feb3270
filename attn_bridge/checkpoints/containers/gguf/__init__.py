"""GGUF, the files of llama.cpp: read, not written. `header` parses, `reader` has the tensors, `config` the model's."""
