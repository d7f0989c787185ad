"""Settings of a run, one class per section of `config.toml`. `tidegate train --settings` prints the
docstrings.

settings = load_settings(Path("config.toml"), ["--trainer.max_staleness", "1"])
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import model_validator

from tidegate import __version__
from tidegate.settings.evaluation import EvalSettings
from tidegate.settings.policies import PolicySettings, check_adapter, check_policies
from tidegate.settings.reading import STARTED, load
from tidegate.settings.run import AgentSettings, ClusterSettings, RunSettings
from tidegate.settings.sections import SettingsSection, to_toml
from tidegate.settings.servers import (
    EngineSettings,
    EnvSettings,
    GatewaySettings,
    ModelSettings,
    PolicyName,
    SamplingSettings,
)
from tidegate.settings.sft import SFTSettings
from tidegate.settings.trainer import ENDLESS, LoRASettings, TrainerSettings

SERVICE_SETTINGS = "service.toml"
"""File in the run directory of a standing service with the service's settings."""
__all__ = [
    "ENDLESS", "EngineSettings", "EnvSettings", "EvalSettings", "GatewaySettings", "LoRASettings",
    "ModelSettings", "Settings", "TrainerSettings", "load_settings",
]  # fmt: skip


class Settings(SettingsSection):
    """All settings of a run; `tidegate train --settings` lists them with their defaults."""

    run: RunSettings = RunSettings()
    model: ModelSettings
    policies: dict[PolicyName, PolicySettings] = {}
    """Policies by the name by which agents choose them as the model (docs/policies.md); empty: the run has
    one policy, that of `model.path`."""
    engine: EngineSettings = EngineSettings()
    gateway: GatewaySettings = GatewaySettings()
    env: EnvSettings = EnvSettings()
    agent: AgentSettings = AgentSettings()
    sampling: SamplingSettings = SamplingSettings()
    trainer: TrainerSettings = TrainerSettings()
    eval: EvalSettings = EvalSettings()
    cluster: ClusterSettings = ClusterSettings()
    sft: SFTSettings = SFTSettings()

    @property
    def stall_timeout_s(self) -> float:
        """Time without progress after which the run stops: at least twice the deadlines of an episode."""
        rewards_s = self.env.reward_timeout_s + self.env.judge.limit_s
        return max(self.trainer.watchdog_s, 2 * (self.agent.deadline_s + rewards_s))

    @property
    def off_policy(self) -> str | None:
        """The setting by which tokens may be sampled from other weights than the trainer's; None if none."""
        if self.trainer.max_staleness != 0:
            return f"trainer.max_staleness = {self.trainer.max_staleness}"
        for name, engine in self._engines_in_training().items():
            if engine.quantize is not None:
                return f'{name}.quantize = "{engine.quantize}"'
            if any(word.startswith("--quantization") for word in engine.arguments):
                return f"{name}.arguments has --quantization"
        return None

    def _engines_in_training(self) -> dict[str, EngineSettings]:
        """Returns the sections of the engines from whose tokens a policy learns, by dotted name."""
        sections = {
            f"policies.{name}.engine" if policy.engine else "engine": policy.engine or self.engine
            for name, policy in self.policies.items()
            if policy.trained
        }
        return sections or {"engine": self.engine}

    @property
    def centering(self) -> str:
        """Describes score centering and its reason."""
        loss, why = self.trainer.loss, self.off_policy
        unsuited = f", as {loss.name} clips by the sign of the advantage (docs/losses.md)"
        if loss.listed_ids:
            text = f"score centering over {loss.listed_ids} ids; {why or 'tokens are of the newest weights'}"
            return text + f"; it may worsen learning{unsuited}" * loss.clips_by_sign
        if why is None or not loss.auto_listed:
            told = why is not None and loss.clips_by_sign and self.trainer.backend == "own"
            return "no score centering" + unsuited * told
        return f'no score centering; trainer.loss.score_centering = "auto" is {loss.auto_listed}, as {why}'

    @property
    def run_dir(self) -> Path:
        return self.run.dir / self.run.name

    @property
    def policy_names(self) -> list[str]:
        """Names of the policies; "" alone if the run has one policy without a name."""
        return [*self.policies] or [""]

    @property
    def trained_policies(self) -> list[str]:
        """Names of the policies that are trained."""
        return [name for name, policy in self.policies.items() if policy.trained] or [""]

    def of_policy(self, name: str) -> Settings:
        """Returns the settings of a run with this policy alone; of the whole run for the name ""."""
        if not name:
            return self
        own = self.policies[name]
        base = own if own.earlier is None else self.policies[own.earlier]
        changes = {"learning_rate": base.learning_rate, "loss": base.loss, "lora": base.lora}
        trainer = self.trainer.model_copy(
            update={key: value for key, value in changes.items() if value is not None}
        )
        model = self.model if base.path is None else self.model.model_copy(update={"path": base.path})
        engine = self.engine if own.engine is None else own.engine
        return self.model_copy(update={"model": model, "trainer": trainer, "engine": engine, "policies": {}})

    def of_engines(self, first: str) -> Settings:
        """Returns the settings of the engines of this name, with the policies that they serve."""
        if not first:
            return self
        served = {
            name: self.policies[name].model_copy(update={"lora": self.of_policy(name).trainer.lora})
            for name in self.engine_sets[first]
        }
        return self.of_policy(first).model_copy(update={"policies": served})

    @property
    def engine_sets(self) -> dict[str, list[str]]:
        """The policies that share engines, by the name of the first one; {"": [""]} of a run without names.

        Policies share engines if their adapters have one base, and none has engines of its own. vLLM serves
        frozen ones apart: on a CPU it gives a row without an adapter that of its last slot (vllm#48421).
        """
        sets: dict[str, list[str]] = {}
        by_base: dict[Path, str] = {}
        for name in self.policy_names:
            own, of_run = self.policies.get(name), self.of_policy(name)
            shares = (
                own is not None
                and own.engine is None
                and of_run.trainer.lora.publish == "adapter"
                and (own.train or of_run.engine.kind != "vllm")
            )
            first = by_base.setdefault(of_run.model.path.absolute(), name) if shares else name
            sets.setdefault(first, []).append(name)
        return sets

    @model_validator(mode="after")
    def _consistent(self) -> Settings:
        self._choose_centering()
        context = self.engine.context
        if context is not None and self.sampling.max_tokens >= context:
            raise ValueError(
                f"sampling.max_tokens = {self.sampling.max_tokens} leaves no room for a prompt in "
                f"engine.max_context = {context}; lower it, or raise engine.max_context"
            )
        if self.gateway.structured_output == "grammar" and self.engine.kind != "embedded":
            raise ValueError(
                'gateway.structured_output = "grammar" needs engine.kind = "embedded": other engines do not '
                "report which tokens the grammar changed, so no token of such a reply could be "
                'trained on; use gateway.structured_output = "text"'
            )
        if self.engine.kind == "vllm" and self.trainer.routing_replay:
            raise ValueError(
                'trainer.routing_replay needs engine.kind = "embedded" or "sglang": tidegate vllm returns no '
                "experts of tokens"
            )
        asked, own_vllm = "--return-sampling-mask", self.engine.kind == "vllm" and not self.engine.urls
        if own_vllm and self.sampling.records_kept_ids and asked not in self.engine.arguments:
            raise ValueError(
                "sampling.top_p, top_k, min_p and narrowed_by_agents need the ids that vLLM keeps, which it "
                f'returns with engine.arguments = ["{asked}"]; add it, which switches vLLM\'s fast '
                "sampler off, or remove the setting"
            )
        if self.engine.kind == "vllm" and self.trainer.publish_transport == "broadcast":
            raise ValueError(
                'trainer.publish_transport = "broadcast" is not supported by engine.kind = "vllm", which '
                'loads weights from files only; use "files"'
            )
        if self.engine.pause == "in_place":
            self._check_pause()
        check_adapter(self.trainer, self.engine)
        if (self.trainer.backend == "tinker") != (self.engine.kind == "tinker"):
            raise ValueError(
                f'trainer.backend = "{self.trainer.backend}" and engine.kind = "{self.engine.kind}": a '
                'service that trains also samples; set both to "tinker" or none'
            )
        sampling = self.sampling
        if self.trainer.backend == "tinker" and (sampling.temperature != 1 or sampling.records_kept_ids):
            raise ValueError(
                f"sampling.temperature = {sampling.temperature:g}, or another setting of sampling: a Tinker "
                "service trains at temperature 1 only, on the whole distribution; set it to 1"
            )
        if self.policies:
            self._check_policies()
        self._check_source()
        self._check_promotion()
        self._check_evaluation()
        self._check_teacher()
        if self.trainer.until is not None and not self.eval.every:
            raise ValueError(
                "trainer.until needs evaluations between the first and the last step: set eval.every"
            )
        if not self.gateway.on_loopback and self.gateway.admin_key is None:
            raise ValueError(
                f"gateway.host = {self.gateway.host!r} accepts connections from other machines: "
                "set gateway.admin_key"
            )
        return self

    def _choose_centering(self) -> None:
        """Replaces `score_centering = "auto"` of the run's loss and of policies by a number of ids."""

        def chosen(section: Any) -> Any:
            if getattr(section.loss, "score_centering", 0) != "auto":
                return section
            listed = section.loss.auto_listed if self.off_policy else 0
            loss = section.loss.model_copy(update={"score_centering": listed})
            return section.model_copy(update={"loss": loss})

        object.__setattr__(self, "trainer", chosen(self.trainer))
        policies = {name: chosen(policy) for name, policy in self.policies.items()}
        object.__setattr__(self, "policies", policies)

    def _check_policies(self) -> None:
        """Raises ValueError if settings contradict `policies`."""
        check_policies(self.policies, self.trainer, self.engine)
        for name in self.policies:  # each by itself must be one that a run may have
            type(self).model_validate(self.of_policy(name).model_dump())
        trainer = self.trainer
        needs: dict[str, tuple[object, object]] = {
            "trainer.backend": (trainer.backend, "own"),
            "trainer.ranks": (trainer.ranks, 1),
            "trainer.minibatches": (trainer.minibatches, 1),
            "trainer.publish_transport": (trainer.publish_transport, "files"),
            "trainer.promotion.mode": (trainer.promotion.mode, "always"),
            "trainer.teacher": (trainer.teacher.enabled, False),
            "trainer.reference_model": (trainer.reference_model, None),
            "eval.engines": (self.eval.engines, 0),
            "gateway.url": (self.gateway.url, None),
            "engine.urls": (self.engine.urls, []),
        }
        for name, (value, only) in needs.items():
            if value != only:
                raise ValueError(f"{name} = {value!r} is not supported with policies: it must be {only!r}")

    def _check_pause(self) -> None:
        """Raises ValueError if settings contradict `engine.pause = "in_place"`."""
        if self.trainer.max_staleness == 0:
            raise ValueError(
                'engine.pause = "in_place" needs trainer.max_staleness of at least 1, not 0: with 0 no '
                "request may run during a publish, so remove it"
            )
        if self.gateway.url is not None:
            raise ValueError(
                'engine.pause = "in_place" has no effect with gateway.url: the gateway there labels keys and '
                "values only if it has this setting, too; use a gateway that the run starts"
            )
        if self.trainer.promotion.mode != "always":
            raise ValueError(
                f'engine.pause = "in_place" contradicts trainer.promotion.mode = '
                f'"{self.trainer.promotion.mode}", which takes versions back: remove one of the two'
            )

    def _check_promotion(self) -> None:
        """Raises ValueError if settings contradict `trainer.promotion`."""
        promotion = self.trainer.promotion
        if promotion.mode == "always":
            return
        source, name = self.agent.source, f'trainer.promotion.mode = "{promotion.mode}"'
        if (source == "client") != (promotion.mode == "canary"):
            needs = '"client"' if promotion.mode == "canary" else '"local" or "remote"'
            raise ValueError(f'{name} needs agent.source = {needs}, not "{source}"')
        self._check_reserved(name, f"trainer.promotion.engines = {promotion.engines}", promotion.engines)
        if self.trainer.publish_interval == "never":
            raise ValueError(f'{name} has no effect with trainer.publish_interval = "never"')

    def _check_evaluation(self) -> None:
        """Raises ValueError if settings contradict `eval.engines`."""
        reserved = self.eval.engines
        if not reserved:
            return
        name = f"eval.engines = {reserved}"
        self._check_reserved(name, str(reserved), reserved)
        if self.trainer.publish_transport != "files":
            raise ValueError(f'{name} needs trainer.publish_transport = "files"')
        if self.trainer.promotion.mode != "always":
            raise ValueError(
                f'{name} contradicts trainer.promotion.mode = "{self.trainer.promotion.mode}", which '
                "reserves engines itself: remove one of the two"
            )

    def _check_reserved(self, name: str, limit: str, reserved: int) -> None:
        """Raises ValueError if a feature that reserves engines leaves none, or gateways are sharded."""
        if (engines := len(self.engine.urls) or self.engine.count) <= reserved:
            raise ValueError(
                f"{name} needs more than {limit} engines, and there are {engines}: raise engine.count"
            )
        if self.gateway.shards > 1:
            raise ValueError(f"{name} needs gateway.shards = 1, not {self.gateway.shards}")

    def _check_teacher(self) -> None:
        """Raises ValueError if settings contradict `trainer.teacher`."""
        teacher = self.trainer.teacher
        if teacher.enabled and self.sampling.records_kept_ids:
            raise ValueError(
                "sampling.top_p, top_k, min_p and narrowed_by_agents contradict trainer.teacher, whose "
                "logprobs are of its whole vocabulary: remove one of the two"
            )
        if self.engine.kind != "embedded" and any(model.path for model in teacher.models.values()):
            raise ValueError(
                f'trainer.teacher.path needs engine.kind = "embedded", whose settings the teacher\'s engine '
                f'has, not "{self.engine.kind}": start the teacher as an engine of its own, and set '
                "trainer.teacher.url"
            )
        if teacher.hint is not None and self.agent.source == "client":
            raise ValueError(
                'trainer.teacher.hint has no effect with agent.source = "client": clients have the tasks'
            )

    def _check_source(self) -> None:
        """Raises ValueError if settings contradict `agent.source`."""
        source = self.agent.source
        if source != "local" and self.sft.held_out:
            raise ValueError(
                f'sft.held_out runs the agent here, which needs agent.source = "local", not "{source}"'
            )
        if source == "client" and self.gateway.shards > 1:
            raise ValueError(
                f'agent.source = "client" needs gateway.shards = 1, not {self.gateway.shards}: clients form '
                "groups in one gateway process"
            )
        gateway = self.gateway
        if source == "client" and gateway.keys is None and gateway.url is None:
            raise ValueError(
                'agent.source = "client" needs gateway.keys, the file with the keys of its clients: '
                "tidegate keys create NAME makes one"
            )
        if source != "client" and gateway.keys is not None:
            raise ValueError(f'gateway.keys is for agent.source = "client"; it has no effect with "{source}"')
        if source == "client" and self.trainer.until is not None:
            raise ValueError(
                'trainer.until has no effect with agent.source = "client": the run evaluates nothing'
            )
        only_clients = [
            f"{section}.{name}"
            for section, settings, names in (
                ("trainer", self.trainer, ("max_client_share", "max_stale_share", "gate_timeout_s")),
                ("gateway", gateway, ("redact", "reward_range", "conversation_rewards")),
            )
            for name in settings.other_than_default(*names)
        ]
        if source != "client" and only_clients:
            raise ValueError(f'{only_clients[0]} is for agent.source = "client"')
        sections: dict[str, SettingsSection] = {"env": self.env, "eval": self.eval}
        if gateway.url is not None and self.env.judge.url is not None:
            raise ValueError(
                f"env.judge has no effect with gateway.url: the gateway at {gateway.url} has its own judge"
            )
        if source == "client" and self.env.judge.kind == "ranking":
            raise ValueError(
                'env.judge.kind = "ranking" has no effect with agent.source = "client": a conversation is a '
                'group of its own; use "score" or "criteria"'
            )
        for name, section in sections.items() if source == "client" else ():
            names = [field for field in type(section).model_fields if field != "judge"]
            if idle := section.other_than_default(*names):
                raise ValueError(
                    f'{name}.{idle[0]} has no effect with agent.source = "client": tasks, '
                    "rewards and evaluations come from the clients"
                )


def saved(settings: Settings) -> str:
    """Returns the content of a run's `config.toml`, with the version and the directory of the start."""
    where = json.dumps(str(Path.cwd()), ensure_ascii=False)
    unused = None if settings.policies else {"policies"}
    values = settings.model_dump(mode="json", exclude=unused)
    return f"# Tidegate {__version__}, {STARTED}{where}\n{to_toml(values)}"


def load_settings(path: Path | None, overrides: Sequence[str] = ()) -> Settings:
    """Reads a run's settings.

    Args:
        path: A TOML file; None: defaults only.
        overrides: Words `--section.key value` or `--section.key=value`, which take precedence.

    Raises:
        ConfigError: A key is unknown or missing, or a value is invalid.
    """
    return load(Settings, path, overrides)
