"""DeepSeek-V3 and R1: latent attention, experts in groups, layers for several next tokens."""
