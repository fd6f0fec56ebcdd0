"""The forms on the cache's page: whose tree it is, and why a prompt would hit."""

import base64
import hashlib
import html


def forms(cache_salt: str, *, everything: bool, may_see_all: bool, replica: int | None = None) -> str:
    """Their HTML. cache_salt: of the namespace that is shown, empty for none. replica: None if there is only one."""
    query = "" if replica is None else f"replica={replica}"
    one, every = (f"cache?{query}" if query else "cache"), "&amp;".join(filter(None, ("cache?all=true", query)))
    other = f'<a href="{one}">One namespace</a>' if everything else f'<a href="{every}">All namespaces</a>'
    which = "" if replica is None else _REPLICA.format(replica=replica)
    return _FORMS.format(
        salt=html.escape(cache_salt), other=other if may_see_all else "", replica=which, script=_SCRIPT
    )


_REPLICA = '<label>Replica <input name="replica" type="number" min="0" value="{replica}"></label>\n'


_FORMS = """<section class="card"><h2>Why would a prompt hit?</h2>
<form id="explain">
<div class="inline">
<label>Given as <select name="kind"><option value="text">text, as to /generate</option>
<option value="messages">a chat, as to /v1/chat/completions</option></select></label>
<label>cache_salt <input name="cache_salt" value="{salt}" autocomplete="off" placeholder="none"></label>
</div>
<label id="system" hidden>System prompt <textarea name="system" placeholder="none"></textarea></label>
<label>Prompt <textarea name="prompt" required></textarea></label>
<button>Explain</button>
</form>
<div id="answer" class="answer" role="status"></div>
<noscript><p>This form needs scripts. Without them: POST /cache/explain.</p></noscript>
</section>
<form class="card inline" action="cache">
<label>Show the tree of the cache_salt
<input name="cache_salt" value="{salt}" autocomplete="off" placeholder="none"></label>
{replica}<button>Show</button>{other}
</form>
<script>{script}</script>"""

_SCRIPT = """
const form = document.getElementById("explain"), answer = document.getElementById("answer");
const fields = form.elements;
const showSystem = () => { document.getElementById("system").hidden = fields.kind.value !== "messages"; };
fields.kind.addEventListener("change", showSystem);
showSystem();

function part(list, name, text) {
  const term = document.createElement("dt"), detail = document.createElement("dd");
  const block = document.createElement("pre");
  term.textContent = name;
  block.textContent = text;
  detail.append(block);
  list.append(term, detail);
}

function show(found) {
  const meter = document.createElement("div"), filled = document.createElement("i");
  meter.className = "meter";
  filled.style.width = 100 * found.cached_tokens / found.prompt_tokens + "%";
  meter.append(filled);
  const sentence = document.createElement("p"), list = document.createElement("dl");
  const differs = `${found.cached_tokens} of the prompt's ${found.prompt_tokens} tokens are cached: ` +
    `it differs from token ${found.diverged_at} on.`;
  sentence.textContent = found.diverged_at === null ? `${found.explanation}.` : differs;
  if (found.shared_end) part(list, "The end of what is shared", found.shared_end);
  if (found.cached_next) part(list, "Cached after that", found.cached_next);
  if (found.asked_next) part(list, "Asked after that", found.asked_next);
  answer.replaceChildren(meter, sentence, list);
}

form.addEventListener("submit", async (event) => {
  event.preventDefault();
  const body = {cache_salt: fields.cache_salt.value || null};
  if (fields.kind.value === "text") {
    body.text = fields.prompt.value;
  } else {
    body.messages = [{role: "user", content: fields.prompt.value}];
    if (fields.system.value) body.messages.unshift({role: "system", content: fields.system.value});
  }
  try {
    const response = await fetch("cache/explain", {
      method: "POST", headers: {"Content-Type": "application/json"}, body: JSON.stringify(body),
    });
    const found = await response.json();
    if (response.ok) show(found); else answer.textContent = found.error.message;
  } catch (error) {
    answer.textContent = "The server does not answer: " + error.message;
  }
});
"""

_HASH = base64.b64encode(hashlib.sha256(_SCRIPT.encode()).digest()).decode()
HEADERS = {
    "Content-Security-Policy": (
        f"default-src 'none'; script-src 'sha256-{_HASH}'; style-src 'unsafe-inline'; connect-src 'self'; "
        "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
}
"""Of the page: it runs this script and no other, loads nothing, and is not kept. Texts of tenants are on it."""
