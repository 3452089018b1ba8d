"""mha-deploy: from a PyTorch attention block to a verified, fast, served engine."""
