"""The engine that these tests run against must be like the real one."""

import inspect

import pytest

from tests.http.fake_engine import FakeEngine, FakeStream
from xylite.config import EngineConfig
from xylite.text_engine import TextEngine, TextStream


@pytest.mark.parametrize(
    "method", ["encode", "decode", "token_text", "require_room", "submit", "drain", "snapshot"]
)
def test_methods_have_the_real_signature(method: str) -> None:
    fake, real = (inspect.signature(getattr(e, method)) for e in (FakeEngine, TextEngine))
    assert [(p.name, p.kind, p.default) for p in fake.parameters.values()] == [
        (p.name, p.kind, p.default) for p in real.parameters.values()
    ]


async def test_render_takes_what_is_sent_to_it() -> None:
    engine = FakeEngine()
    options = {
        "tools": None,
        "add_generation_prompt": True,
        "continue_final_message": False,
        "add_special_tokens": False,
        "template_kwargs": {},
        "raw_control_tokens": False,
    }
    await engine.render([{"role": "user", "content": "x"}], **options)
    real = inspect.signature(TextEngine.render).parameters
    assert [n for n, p in real.items() if p.kind is p.KEYWORD_ONLY] == list(options)


def test_attributes_are_those_of_the_real_one() -> None:
    real = TextEngine(EngineConfig(model="x"))
    declared = {"limits"}  # set at start
    names = ("config", "model_names", "sampling_defaults", "created", "observers", "limits", "dead")
    for name in names:
        assert hasattr(FakeEngine(), name)
        assert hasattr(real, name) or name in declared
    assert real.state == "loading"
    for name in ("__aiter__", "aclose", "watch", "take", "is_over"):
        assert hasattr(FakeStream, name) and hasattr(TextStream, name)
