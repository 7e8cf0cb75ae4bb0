"""The only package that imports Megatron: it attaches the engine and can detach it again."""
