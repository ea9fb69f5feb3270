"""Where the project and its site are on the network."""

REPOSITORY = "https://github.com/attn-bridge/attn-bridge"
SITE = "https://attn-bridge.github.io/attn-bridge"
COLAB = REPOSITORY.replace("https://github.com", "https://colab.research.google.com/github") + "/blob/main/notebooks"
