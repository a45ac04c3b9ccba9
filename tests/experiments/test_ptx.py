import pytest

from experiments import ptx

KERNEL = """\
.visible .entry kernel(
\t.param .u64 .ptr .align 256 kernel_param_0
)
.maxntid 384, 1, 1
{
\t.reg .pred \t%p<17>;
\t.loc\t1 305 0
\tmov.u32 \t%r1, %tid.x; // ld.global.b32 of a comment
\t// begin inline asm
\tsetmaxnreg.dec.sync.aligned.u32 40;
$L__BB0_1:
\tld.global.v4.b32 \t{%r3, %r4, %r5, %r17}, [%rd18];
$L__BB0_2:
\t{ .reg .pred p; setp.ne.b32 p, 1, 0; wgmma.mma_async.sync.aligned \
{%r1,%r2}, %rd1, p; }
\t@!%p11 bra \t$L__BB0_3;
\t@%p12 bra \t$L__BB0_2;
$L__BB0_3:
\tbra.uni \t$L__BB0_1;
\tsetmaxnreg.inc.sync.aligned.u32 232;
\tret;
}
"""


def test_opcodes():
  assert ptx.opcodes(KERNEL) == (
    "mov.u32",
    "setmaxnreg.dec.sync.aligned.u32",
    "ld.global.v4.b32",
    "setp.ne.b32",
    "wgmma.mma_async.sync.aligned",
    "bra",
    "bra",
    "bra.uni",
    "setmaxnreg.inc.sync.aligned.u32",
    "ret",
  )
  assert ptx.count(KERNEL, "wgmma.mma_async") == 1
  assert ptx.count(KERNEL, "ld.") == 1


def test_loops_end_with_a_branch_back():
  inner, outer = ptx.loops(KERNEL)
  assert inner == ("setp.ne.b32", "wgmma.mma_async.sync.aligned", "bra", "bra")
  assert outer == ("ld.global.v4.b32", *inner, "bra.uni")


def test_warpgroups_and_their_registers():
  assert ptx.warpgroups(KERNEL) == 3
  assert ptx.redistribution(KERNEL) == (40, 232)
  assert ptx.redistribution("\tret;") is None
  with pytest.raises(ValueError, match="no block"):
    ptx.warpgroups("\tret;")


def test_registers_of_other_kernels():
  other = KERNEL.replace("ret;", "setmaxnreg.inc.sync.aligned.u32 160;")
  with pytest.raises(ValueError, match=r"\['40'\] and \['160', '232'\]"):
    ptx.redistribution(other)
