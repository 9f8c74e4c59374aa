"""A bank of adapters: K adapters of the same shapes over one base in one forward pass, each row of tokens with its own.

The leaves of the adapters are stacked, behind the axis of a scanned stack: A [K, *inputs, r], B [K, r, *outputs], scale
[K]. With k the number of a row's adapter

    y = x W + scale[k] * (x A[k]) B[k]

An adapter set (models.adapters.adapter_set) lays its adapters side by side as columns of one matrix, and each token
pays for all columns. In a bank a row pays for those of its own adapter alone, and nothing of a row reaches another one
or another adapter, not even a number that is not finite: products over tokens are taken within a row, and the gradient
of an adapter is the sum over its own rows. So the bits of a row do not depend on what the other rows hold.

Which adapters are in the bank is data; members may have unused columns, which are zero. Called by models.decoder
(forward) and service.trainer, which stacks and takes apart.

Legend: K adapters, B rows, L tokens per row, r rank.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P


def numbers_of_rows(whose_BxL):
    """Returns the number [B] int of each row's adapter, from those of its tokens [B, L]: their maximum, since padding
    has 0.
    """
    return jnp.max(whose_BxL, axis=1)


def product(x, kernels, numbers_B, inputs: int):
    """Contracts x [B, ..., *I] over its last `inputs` axes with each row's kernel of [K, *I, *O]; [B, ..., *O] in their
    dtype. numbers_B: int, which of the K kernels a row has. The kernels are gathered by row, [B, *I, *O].
    """
    own = kernels[numbers_B]
    of_x, of_kernel = tuple(range(x.ndim - inputs, x.ndim)), tuple(range(1, 1 + inputs))
    return jax.lax.dot_general(x, own, ((of_x, of_kernel), ((0,), (0,))))


def scaled(few, scale_K, numbers_B):
    """Returns few [B, ..., r] times the scale of each row's adapter.

    scale_K: [K], in few's dtype. numbers_B: int, number of each row's adapter.
    """
    return few * scale_K[numbers_B].reshape(-1, *(1,) * (few.ndim - 1))


def axes(model) -> dict[str, int]:
    """Returns {flat name of an adapter's leaf: axis along which a bank stacks it}."""
    return {"/".join(entry.path): entry.stacked for entry in model.entries if entry.row.init == "adapter"}


def sharding(one: NamedSharding, axis: int) -> NamedSharding:
    """Returns the sharding of a stacked leaf: that of the leaf, `one`, and whole along `axis`, which the bank stacks it
    along.
    """
    spec = (*one.spec, *(None,) * (axis - len(one.spec)))
    return NamedSharding(one.mesh, P(*spec[:axis], None, *spec[axis:]), memory_kind=one.memory_kind)
