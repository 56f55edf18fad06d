"""What `--help` says: each command's examples first."""

DIPTYCH = """\
Serve large language models with prefill and decode on separate workers.

  diptych up                          the whole stack on this machine, on port 8080
  diptych chat                        talk to it
  diptych top                         who is there, how loaded, how requests fare
  diptych scale decode 3              more or fewer workers while it runs
  diptych tap 'event.>'               what goes over the bus
  diptych kv                          KV transfers on their way; blocks, and the story of one
  diptych dead list                   requests that were given up
  diptych keys create --name laptop   API keys: with one, every request needs one
  diptych tenants list                whose keys, and how much they may take together
  diptych usage                       what each tenant used, per day
  diptych audit                       who did what to keys, tenants and the fleet
  diptych doctor                      can this machine run it?
  diptych models list                 weights known by name
"""

UP = """\
Start NATS, one prefill worker, one decode worker, scheduler, power-governor and gateway, each a
process of its own, and stay in the foreground. Fetches the weights at the first start.
Ctrl-C stops everything.

  diptych up                          SmolLM2 135M at http://127.0.0.1:8080/v1
  diptych up --port 9000 --decode 2   another port, two decode workers
  diptych up --prefill 2 --decode 3 --gateways 2 --schedulers 2
  diptych up --prefill 0              decode workers do both phases
  diptych up --model ./my-model.gguf  weights of your own
  diptych up --model OWNER/REPO       weights from Hugging Face
  diptych up --host 0.0.0.0           for the network: after diptych keys create
  diptych up -v                       show every service's log, not only warnings

Gateways share the port; the kernel spreads connections over them. diptych scale changes the
numbers while the stack runs.
Settings of a service come from its environment, e.g. DIPTYCH_GATEWAY__MAX_IN_FLIGHT=64.
"""

SCALE = """\
Run more or fewer processes of one service in a running stack. Returns once all serve, and whoever
leaves has finished what it holds (up to a minute): no request is lost.

  diptych scale decode 3
  diptych scale prefill 0             decode workers do both phases
  diptych scale gateways 2
  diptych scale schedulers 2 --port 9000

Exit code 1 if it could not be done; 0 when it is so.
"""

CHAT = """\
Talk to a model in the terminal. Without --url it finds the stack that runs on this machine.
After each answer a line says where it ran and what it took. Ctrl-C stops an answer, /new starts
over, Ctrl-D leaves.

  diptych chat
  diptych chat --temperature 0 "What is the capital of France?"
  echo "What is the capital of France?" | diptych chat
  diptych chat --url https://example.org/v1 --model some-model    (key: OPENAI_API_KEY)
  DIPTYCH_API_KEY=dk-… diptych chat   a stack with API keys

The answer goes to standard output, everything else to standard error. Exit code 1 if a question
got no answer.
"""

BATCH = """\
Run a file of requests at the lowest priority, however long that takes (24 h at most). Each line:

  {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions",
   "body": {"model": "smollm2-135m", "messages": [{"role": "user", "content": "Hello"}]}}

  diptych batch lines.jsonl > results.jsonl
  diptych batch lines.jsonl --output results.jsonl --errors failed.jsonl
  diptych batch batch_0123...        wait for one that runs: Ctrl-C stops only the waiting

The batch is the server's: it goes on without this command, and through restarts. Exit code 1 if
not every request succeeded.
"""

TOP = """\
Who is there, whether it serves, its load, KV use, speed and power; and requests by state.

  diptych top                         live, until Ctrl-C
  diptych top --once                  one table, for scripts
  diptych top --port 9000
"""

TAP = """\
Print what goes over the stack's bus: one JSON line per message with time, subject, size and type,
decoded as plain MessagePack. Wildcards: * is one token, > is all the rest. Without a subject:
everything but telemetry (beat.>, load.>, power.>), copies of what is stored (live.>) and the
server's own ($JS.>, _INBOX.>).

  diptych tap                         a request's way through the stack
  diptych tap 'live.>'                tokens as gateways get them
  diptych tap 'event.>' --count 1     wait for one event
  diptych tap 'request.>' --all       with the prompt's token ids
  diptych tap 'job.>' --nats-url tls://127.0.0.1:4222 --identity operator.creds

Token ids are counted, not shown, unless --all: they are what people wrote and were answered.
"""

KV = """\
The KV transfers on their way to each worker and from it: state, peer, age, time left, bytes, and
why one ended. A transfer takes milliseconds, so look again and again, or at those that are over.

  diptych kv                          or: diptych kv transfers
  diptych kv --watch                  twice a second, until Ctrl-C
  diptych kv --ended 10               the last ten of each worker too
  diptych kv --json                   one line, for scripts
  diptych kv blocks                   which slots are free, held and by what, in quarantine
  diptych kv tiers                    where KV is kept beyond the engines
  diptych kv trace 5f0c               all that both sides know of one
"""

KV_BLOCKS = """\
The block slots of each worker that KV is written into: how many are free, held or in quarantine,
which transfer holds which (a slot's number, and in brackets its generation: how often it was handed
out), and for how long; and how many blocks the worker's engine keeps for prompts that begin alike.

  diptych kv blocks
  diptych kv blocks --json            one line, for scripts
"""

KV_TIERS = """\
Where each worker keeps KV beyond its engine, the fastest first: how much, how often it was found
there, what did not verify, why a tier is left alone at the moment; and what was restored by it.

  diptych kv tiers
  diptych kv tiers --json             one line, for scripts
"""

KV_TRACE = """\
The story of one request's transfers as writer and reader tell it: every state with its time, bytes,
link, codec, seal, what overlapped with compute, and why it failed. Each worker remembers the last
thousand that are over. Exit code 1 if none knows the id.

  diptych kv trace 5f0c               an id as a client, a log or a table shows it; or its beginning
  diptych kv trace 5f0c6a2e.2         that of a second attempt
  diptych kv trace 5f0c --json        one line, for scripts
"""

DEAD = """\
Requests that ended as failed, kept for seven days: which, why, whom they took down; and another
try. A retry is a new request with an id of its own. It runs in the background; its answer is read
like any stored response, and kept for a day once somebody has read it or asked for it (do so
within 75 minutes).

  diptych dead list
  diptych dead show 5f0c              an id, or how it begins
  diptych dead show 5f0c --prompt     what was asked too: people wrote that
  diptych dead retry 5f0c             prints where the answer will be
  diptych dead retry --all            every one that was not retried yet
  diptych dead list --nats-url tls://127.0.0.1:4222 --identity operator.creds

Exit code 1 if something could not be retried; what could is retried nevertheless.
"""

MODELS = """\
Weights known by name, and fetching them.

  diptych models list
  diptych models pull smollm2-135m
  diptych models pull OWNER/REPO:FILE.gguf
"""

SETTINGS = """\
Every setting of the services: its environment variable, what it takes, its default, what it does.

  diptych settings                    of every service
  diptych settings gateway            as python -m diptych_gateway --help says
  DIPTYCH_GATEWAY__MAX_IN_FLIGHT=512 diptych up
"""

DOCTOR = """\
Check what the stack needs on this machine and say what to do. Exit code 1 if something is missing.

  diptych doctor
  diptych doctor --port 9000
  diptych doctor engine tensorrt_llm
  diptych doctor links
"""

LINKS_DOCTOR = """\
What this machine has for KV to cross, and which link each pair of a running stack's workers takes,
with the reason.

  diptych doctor links
"""

ENGINE_DOCTOR = """\
Look at an engine that a worker is put in front of: whether it is there, which version, what it can,
and where it differs from what its adapter is written for. Exit code 1 if it could not be used.

  diptych doctor engine tensorrt_llm
  diptych doctor engine trtllm_serve --url http://127.0.0.1:8000
  diptych doctor engine vllm --url http://127.0.0.1:8000
"""

KEYS = """\
API keys. Without any, gateways serve this machine alone; with one, every request needs one, as
'Authorization: Bearer <key>'. A key is printed once, where it is made, and stored as a hash. A
change counts at every gateway within about a second, without a restart.

  diptych keys create --name laptop
  diptych keys create --tenant acme --expires 90d --requests-per-minute 600
  diptych keys list
  diptych keys show 5f0c              an id, or how it begins
  diptych keys revoke 5f0c            kept on record; the door stays closed
  diptych keys revoke 5f0c --forget   as if it had never been

Requests that run when their key is revoked run to their end. A key's limits are its own; those of
all keys of a tenant together: diptych tenants limit.
"""

TENANTS = """\
Tenants: whose keys, and what all of them may take together. What one tenant stores no other can
read, and cached prompts are never shared.

  diptych tenants list
  diptych tenants limit acme --requests-per-minute 600 --tokens-per-minute 200000 --concurrency 32
  diptych tenants limit acme          no limit any more
  diptych tenants purge acme          what would be deleted
  diptych tenants purge acme --yes    its keys count no more, what runs is cancelled, all it stored
                                      is deleted; what must age is named. The name stays taken.
"""

AUDIT = """\
Who did what to the fleet, its keys and its tenants: each action with its actor, object, outcome.
Kept for 400 days. An action whose outcome is "asked" was begun, and its end is not known.

  diptych audit
  diptych audit --action keys --since 7d
  diptych audit --actor key:5f0c --json
"""

USAGE = """\
What each tenant used, per day (UTC): requests, tokens, KV held (in tokens times seconds), energy.
Every request that ended is in it once, within seconds. Joules of a simulated device are marked.

  diptych usage
  diptych usage --tenant acme --since 2026-01-01
  diptych usage --json
"""

CERTS = """\
Who a process is on the bus. `diptych up` makes all of this by itself, in `certs` in its folder,
and gives each process it starts an identity of its own for a day, renewed while it lives.

  diptych certs issue decode-worker         for one more process; prints its file
  diptych certs issue observer --ttl 90d --out dashboard.creds
  diptych certs rotate decode-worker        a new signing key; the old counts until retired
  diptych certs retire decode-worker
  diptych certs rotate server               a new certificate of the bus server
  diptych certs revoke FILE                 within a second nobody believes it
  diptych certs make --keys ./certs --host nats      for a stack of your own, compose say

What each role may do, and what a stolen identity can do: docs/security.md.
"""
