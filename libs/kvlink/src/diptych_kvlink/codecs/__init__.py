"""Encodes KV blocks for slow links. Knows nothing of tickets, links or engines."""

from diptych_kvlink.codecs.blocks import decode_block, encode_block

__all__ = ["decode_block", "encode_block"]
