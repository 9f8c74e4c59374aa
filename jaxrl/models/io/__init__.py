"""Model folders on disk: Hugging Face layouts (hf), safetensors files (tensorfile), experts stored together (fused) and
weights stored in few bits (scaled).
"""
