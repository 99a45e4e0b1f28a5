"""What a save of each semantic type is made of: who writes what under which names, and how it is read back.

GLOBAL and TORCH_DCP are shards in data files of our own (`ckptlib.packing`); LOCAL and LEGACY are `torch.save` files
of whole state dicts.
"""
