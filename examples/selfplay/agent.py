"""Two policies play a game: each observation goes to the policy whose turn it is, in a chat of its own."""


async def agent(task, session):
    llm = session.openai()
    chats = {}
    observed = task.messages[-1]
    while observed is not None:
        chat = chats.setdefault(observed["policy"], [])
        chat.append({"role": "user", "content": observed["content"]})
        reply = await llm.chat.completions.create(model=observed["policy"], messages=chat)
        chat.append({"role": "assistant", "content": reply.choices[0].message.content or ""})
        observed = await session.respond(chat[-1])
