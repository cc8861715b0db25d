"""Reading what nvdisasm prints."""

import pytest
from ops.triton.sass import overwritten, reloaded, rewritten, running, serialized

PRODUCT = "HGMMA.64x64x16.F32.BF16 R56, R128, gdesc[UR8], R56, gsb0"
WAIT = "WARPGROUP.DEPBAR.LE gsb0, 0x0"
OPERAND = [f"F2FP.BF16.F32.PACK_AB R{register}, R1, R2" for register in range(128, 132)]
OTHERS = [f"F2FP.BF16.F32.PACK_AB R{register}, R3, R4" for register in range(128, 132)]


def printed(*lines):
    """Labels as they are, all others with an address."""
    return "\n".join(
        line if line.endswith(":") else f"        /*{16 * place:04x}*/  {line} ;"
        for place, line in enumerate(lines)
    )


def loop(*body, before=()):
    return printed(*before, ".L_x_1:", *body, "@P0 BRA `(.L_x_1)", "EXIT")


def test_an_operand_that_a_loop_overwrites_is_found():
    """By ptxas 12.8 and 12.9, of a gradient for groups of 64 features."""
    code = loop(PRODUCT, WAIT, *OTHERS, before=OPERAND)
    assert overwritten(code) == ["0050"]


@pytest.mark.parametrize(
    "code",
    [
        loop(PRODUCT, WAIT, before=OPERAND),
        loop(*OPERAND, PRODUCT, WAIT, *OTHERS),
        loop("LDSM.16.MT88.4 R128, [R227+UR4+0xc000]", PRODUCT, WAIT, *OTHERS, before=OPERAND),
        loop(PRODUCT, WAIT, *OTHERS, "LDL.128 R128, [R1]", before=OPERAND),
        loop(PRODUCT, WAIT, *(f"MOV R{128 + i}, R{20 + i}" for i in range(4)), before=OPERAND),
        loop(*OPERAND, "@P1 BRA `(.L_x_2)", *OTHERS, ".L_x_2:", PRODUCT, WAIT),
        loop("CS2R R128, SRZ", "CS2R R130, SRZ", PRODUCT, WAIT, *OTHERS),
        printed(*OPERAND, PRODUCT, WAIT, *OTHERS, "EXIT"),
        loop("HGMMA.64x64x16.F32.BF16 R56, gdesc[UR8].tnspB, R56, gsb0", WAIT, *OTHERS, before=OPERAND),
        "",
    ],
    ids=[
        "kept",
        "new",
        "loaded",
        "from the stack",
        "moved",
        "of two kinds",
        "zeros",
        "no loop",
        "shared",
        "none",
    ],
)
def test_an_operand_that_is_still_there_or_new_or_back_is_right(code):
    assert overwritten(code) == []


def test_a_write_under_a_condition_counts():
    code = loop(PRODUCT, WAIT, *(f"@P3 {line}" for line in OTHERS), before=OPERAND)
    assert overwritten(code) == ["0050"]


def test_an_operand_that_is_written_before_the_wait_is_found():
    assert rewritten(printed(*OPERAND, PRODUCT, "IADD3 R7, R1, R2, RZ", OTHERS[3], WAIT)) == ["0040"]
    assert rewritten(loop(PRODUCT, *OPERAND)) == ["0010"]
    assert rewritten(loop(*OPERAND, PRODUCT, WAIT, *OTHERS)) == []


def test_products_that_a_wait_leaves_running_are_counted():
    assert running(printed(PRODUCT, WAIT)) == 0
    assert running(printed(PRODUCT, PRODUCT, "WARPGROUP.DEPBAR.LE gsb0, 0x1", WAIT)) == 1
    assert running(printed("WARPGROUP.DEPBAR.LE gsb0, 0x1")) == 0


def test_products_that_follow_one_another_are_not_serialized():
    first = PRODUCT.removesuffix(", gsb0")
    assert serialized(printed(PRODUCT, WAIT, PRODUCT, WAIT, "EXIT"))
    assert not serialized(printed(first, PRODUCT, WAIT, PRODUCT, WAIT, "EXIT"))
    assert not serialized(printed("EXIT"))


def test_loads_of_spills_are_counted_in_the_longest_loop():
    spill, load = "STL [R1+0x4], R8", "LDL R9, [R1+0x4]"
    short = ".L_x_2:", load, "@P1 BRA `(.L_x_2)"
    assert (
        reloaded(
            printed(spill, load, ".L_x_1:", load, *short, spill, "LDL.64 R2, [R1]", "@P0 BRA `(.L_x_1)", load)
        )
        == 3
    )
    assert reloaded(printed(spill, load, "EXIT")) == 0


def test_a_loop_may_go_on_behind_its_longest_branch():
    load = "LDL R9, [R1+0x4]"
    inner = ".L_x_2:", load, "@P1 BRA `(.L_x_1)", load, "@P0 BRA `(.L_x_2)"
    assert reloaded(printed(load, ".L_x_1:", load, *inner, "EXIT")) == 3
