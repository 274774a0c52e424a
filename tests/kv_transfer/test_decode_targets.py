from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest

from inferkit.core.transfer_messages import Handshake
from inferkit.kv_transfer.decode_targets import DecodeTargets, shared_layers
from inferkit.kv_transfer.engines.runs import TransferEngineError
from inferkit.kv_transfer.engines.tcp import TcpEngine
from inferkit.kv_transfer.rank_memory import RankMemory
from inferkit.kv_transfer.transfer_plan import TransferPlanError
from tests.kv_transfer.manager_ranks import MIXED, lay_out, specs_of
from tests.kv_transfer.ranks_alone import Clock

IDLE_S = 100.0


@dataclass
class Setting:
    targets: DecodeTargets
    engine: TcpEngine
    clock: Clock
    memory: RankMemory
    decodes: dict[int, tuple[TcpEngine, RankMemory]]

    def handshake(self, epoch: int = 22, rank: int = 0, **changed: Any) -> Handshake:
        engine, memory = self.decodes[epoch]
        target = memory.target(engine.describe(), attn_tp_size=1)
        values: dict[str, Any] = {
            "instance_id": "d",
            "epoch": epoch,
            "peer_epoch": 11,
            "decode_rank": rank,
            "reply_address": "",
            "transfer_id": 1,
            "floor": 0,
            "required_dst_info_num": 1,
            "memory": msgspec.structs.replace(target, **changed),
        }
        return Handshake(**values)


@pytest.fixture
def setting() -> Iterator[Setting]:
    engine, clock = TcpEngine(epoch=11, receives=False), Clock()
    memory = lay_out(engine, specs_of(MIXED, 1), 1)
    engine.start()
    decodes = {}
    for epoch in (22, 23):
        decode = TcpEngine(epoch=epoch)
        decodes[epoch] = (decode, lay_out(decode, specs_of(MIXED, 1), 1))
        decode.start()
    targets = DecodeTargets(engine=engine, memory=memory, tp=(1, 0), clock=clock, idle_s=IDLE_S)
    yield Setting(targets, engine, clock, memory, decodes)
    engine.close()
    for decode, _ in decodes.values():
        decode.close()


def test_a_rank_is_connected_and_planned_once(setting: Setting) -> None:
    first = setting.targets.of(setting.handshake())
    link, plan = first.link, first.plan
    again = setting.targets.of(setting.handshake())
    assert again is first and again.link is link and again.plan is plan
    other = setting.targets.of(setting.handshake(rank=1))
    assert other is not first and len(setting.targets) == 2


def test_a_link_that_broke_is_made_again(setting: Setting) -> None:
    target = setting.targets.of(setting.handshake())
    link = target.link
    setting.engine.disconnect(link)
    assert setting.targets.of(setting.handshake()).link is not link


def test_a_former_life_is_disconnected_when_nothing_is_in_flight(setting: Setting) -> None:
    former = setting.targets.of(setting.handshake())
    former.num_in_flight = 1
    latter = setting.targets.of(setting.handshake(epoch=23))
    setting.targets.forget_old()
    assert len(setting.targets) == 2 and former.link.is_open
    former.num_in_flight = 0
    setting.targets.forget_old()
    assert len(setting.targets) == 1
    assert not former.link.is_open and latter.link.is_open
    assert setting.targets.of(setting.handshake(epoch=23)) is latter


def test_an_idle_rank_is_disconnected(setting: Setting) -> None:
    target = setting.targets.of(setting.handshake())
    setting.clock.now_s += IDLE_S - 1
    setting.targets.forget_old()
    assert len(setting.targets) == 1
    setting.clock.now_s += 1
    setting.targets.forget_old()
    assert len(setting.targets) == 0 and not target.link.is_open
    assert setting.targets._lives == {}


def test_memory_does_not_change_within_a_life(setting: Setting) -> None:
    setting.targets.of(setting.handshake())
    with pytest.raises(TransferPlanError, match="other memory than before"):
        setting.targets.of(setting.handshake(slot_offset=64))


def test_what_does_not_fit_is_refused(setting: Setting) -> None:
    with pytest.raises(TransferPlanError, match="attn_tp_size=1099511627776; allowed is <= 4096"):
        setting.targets.of(setting.handshake(attn_tp_size=1 << 40))
    with pytest.raises(TransferPlanError, match="no number of blocks"):
        setting.targets.of(setting.handshake(num_blocks={"other": 3}))
    with pytest.raises(TransferEngineError, match="the peer offers transfer engine 'x'"):
        setting.targets.of(setting.handshake(engine={"engine": "x", "format": 1}))
    assert len(setting.targets) == 1  # its plan was made before its engine was looked at


def test_only_layers_of_both_sides_are_shared(setting: Setting) -> None:
    target = setting.handshake().memory
    assert shared_layers(setting.memory, target) == {0: 3, 1: 1}
    fewer = msgspec.structs.replace(target, tensors=target.tensors[:2])
    assert shared_layers(setting.memory, fewer) == {0: 3}
