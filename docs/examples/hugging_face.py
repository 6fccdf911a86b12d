"""Every MLP of a Hugging Face model by this package, with the weights that it has. Here with random ones."""

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from autodispatch.torch import swap_mlps

torch.manual_seed(0)
config = Qwen2Config(
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=1000,
)
model = Qwen2ForCausalLM(config).to("cuda", torch.bfloat16).eval()
tokens = torch.randint(0, 1000, (1, 16), device="cuda")
with torch.no_grad():
    before = model(tokens).logits
    names = set(model.state_dict())
    print(swap_mlps(model), "MLPs swapped")
    after = model(tokens).logits
assert set(model.state_dict()) == names
torch.testing.assert_close(after, before, rtol=5e-2, atol=5e-2)
