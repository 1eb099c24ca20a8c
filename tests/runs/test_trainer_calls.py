"""What the calls of a trainer refuse."""

import pytest
from small_runs import make_module

from lit_grpo import AdditionData, Trainer
from lit_grpo.types import UserError


@pytest.mark.parametrize("call", ["fit", "validate", "test"])
def test_data_and_module_in_the_wrong_order_or_of_other_types_are_refused(call, tmp_path):
    module = make_module(group_size=2)
    data = AdditionData(1, train_size=8, validation_size=0, prompts_per_step=2)
    method = getattr(Trainer(tmp_path / "run", accelerator="cpu", enable_progress_bar=False), call)
    swapped = f"{call} takes the module first and then the data, got AdditionData and then GRPO"
    with pytest.raises(UserError, match=swapped):
        method(data, module)
    with pytest.raises(UserError, match="an object of type list as the data. Write"):
        method(module, [{"prompt": "1+1="}])
    with pytest.raises(UserError, match="the class GRPOModule as the module"):
        method(type(module), data)
    with pytest.raises(UserError, match="got None as the data. Write"):
        method(module, None)
    assert not (tmp_path / "run").exists()
