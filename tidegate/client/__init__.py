"""Client of a training run whose episodes come from your own programs: a notebook, a service, a script.

    async with Client("http://127.0.0.1:8000", key) as client:
        async with client.group("task-7") as group:
            for _ in range(8):
                async with group.episode() as episode:
                    reply = await episode.openai().chat.completions.create(model="policy", messages=[...])
                    episode.reward = score(reply)
        trained = await group

The run has `agent.source = "client"`, and `key` is one of its project keys (`tidegate keys`). This module
needs no torch.
"""

from tidegate.client.groups import Client, ClientEpisode, ClientGroup, TrainedGroup

__all__ = ["Client", "ClientEpisode", "ClientGroup", "TrainedGroup"]
