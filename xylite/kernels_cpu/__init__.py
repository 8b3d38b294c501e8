"""Kernels of the CPU's table: C++ with a plain C interface, built at first start.

    src/vec.h          vectors of the machine's width; AVX-512, AVX2, NEON or what the compiler has
    src/mm.h           the register tile that linear layers and attention share
    src/linear.cpp     packed panels, any number of rows; src/quant.cpp the same in 8 and 4 bits
    src/compact.h      panels of bf16 weights in 12 bits a weight, exactly
    src/attention.cpp  task table and blocked KV; src/elementwise.cpp what lies between
    src/ahead.h        what tiles fetch while they compute; src/keys_ahead.h of it, the next layer's
                       keys and values
    src/pool.h         threads that stay
    build.py           compiler, cache; library.py ctypes; packed.py, blocks.py weights
    tuning.py          what is measured at first start; tuner.py what `xylite tune` measures

The two ideas of the paper for threads: tiles of fixed size over a virtual M (a tile exists for
every number of rows up to its largest, so nothing is padded), and attention cut into tasks that
threads take in the table's order.

Kept because `bench/ops` showed a gain: bf16 by the processor's own dot product where that is faster
than widening to float32 (measured at first start); fetching the next panel while one is multiplied
(8 to 64 rows); bf16 weights in 12 bits, unpacked by the first tile that needs them (by
`bench.ops.steps`, a fifth of a step where reading the weights takes longest, 1 to 8 rows, and
within 1 % from 32 rows on); fetching 8 KiB ahead in a weight that is read once (1 to 8 rows);
fetching the next attention's keys and values in the linear layers before it, where a step decodes
25 sequences or more (a tenth of a step of 32 at 192 keys: attention takes half the time); huge
pages; keys stored by dimension and values by pairs of tokens, as the tiles read them; rows handed
over in bf16 where the next product rounds them anyway; one struct for a call's arguments. Without
effect: pinning allocator thresholds (no page faults are left), larger cache blocks.
"""
