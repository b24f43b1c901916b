"""All families that are known."""

from __future__ import annotations

from areno.models.config import Family
from areno.models.experts.families import MIXTRAL, QWEN3_MOE
from areno.models.families.gemma3 import GEMMA3
from areno.models.families.glm4 import GLM4
from areno.models.families.llama import LLAMA
from areno.models.families.mistral import MISTRAL
from areno.models.families.olmo import OLMO2, OLMO3
from areno.models.families.phi3 import PHI3
from areno.models.families.qwen2 import QWEN2
from areno.models.families.qwen3 import QWEN3
from areno.models.families.qwen3_5 import QWEN3_5
from areno.models.families.smollm3 import SMOLLM3

_KNOWN = (QWEN3, LLAMA, QWEN2, MISTRAL, PHI3, SMOLLM3, OLMO2, OLMO3, GLM4, GEMMA3, QWEN3_MOE, MIXTRAL, QWEN3_5)
FAMILIES: dict[str, Family] = {family.name: family for family in _KNOWN}
