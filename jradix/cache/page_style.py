"""How the cache's page looks."""

STYLE = """
:root {
  color-scheme: light dark;
  --ground: #f4f5f7; --card: #ffffff; --text: #1c2024; --quiet: #596069; --line: #d5d9de; --hover: #eef3f9;
  --protected: #a34f00; --evictable: #1f6fd0; --private: #7a46c2; --free: #dfe3e8; --link: #0b57b7; --good: #1a7f37;
}
@media (prefers-color-scheme: dark) {
  :root {
    --ground: #101318; --card: #191d24; --text: #e5e8ec; --quiet: #9ba4b0; --line: #333a45; --hover: #222833;
    --protected: #e39b3d; --evictable: #5b9df0; --private: #b48af2; --free: #333a45; --link: #7db3f7; --good: #4cc26a;
  }
}
* { box-sizing: border-box; }
[hidden] { display: none !important; }
body { margin: 0; background: var(--ground); color: var(--text); font: 15px/1.5 system-ui, sans-serif; }
header, main { max-width: 74rem; margin: 0 auto; padding: 0 1rem; }
header { display: flex; flex-wrap: wrap; align-items: baseline; gap: 0 1rem; padding-top: 1.2rem; }
header p { margin: 0; color: var(--quiet); overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; margin: 0; }
h2 { font-size: 1.05rem; margin: 0 0 .6rem; overflow-wrap: anywhere; }
small, .facts, .node p { font-size: .85rem; font-weight: normal; color: var(--quiet); }
a { color: var(--link); }
main { padding-bottom: 3rem; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: .6rem; padding: 1rem; margin: 1rem 0; }
:focus-visible { outline: 2px solid var(--link); outline-offset: 1px; }

.pool, .meter { display: flex; gap: 2px; height: 1.1rem; border-radius: .3rem; overflow: hidden; }
.pool i { flex-basis: 3px; }
i.protected { background: var(--protected); } i.evictable { background: var(--evictable); }
i.private { background: var(--private); } i.free { background: var(--free); }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: .3rem 1.6rem; margin: .7rem 0 0; padding: 0; }
.legend i { display: inline-block; width: .8rem; height: .8rem; border-radius: .2rem; margin-right: .2rem; }

section > ul, .branches > ul { list-style: none; margin: 0; padding: 0; }
.branches > ul { margin-left: .4rem; padding-left: 1rem; border-left: 1px solid var(--line); }
li > .node:first-child { margin-top: .3rem; }
summary { cursor: pointer; border-radius: .3rem; }
summary:hover { background: var(--hover); }
.node > summary {
  display: flex; align-items: baseline; gap: 1rem; list-style: none; padding: .15rem .5rem;
  border-left: .35rem solid; border-radius: .15rem;
}
.node > summary::-webkit-details-marker { display: none; }
.node.protected > summary { border-color: var(--protected); }
.node.evictable > summary { border-color: var(--evictable); }
.evictable.age1 > summary { border-color: color-mix(in srgb, var(--evictable) 70%, var(--card)); }
.evictable.age2 > summary { border-color: color-mix(in srgb, var(--evictable) 45%, var(--card)); }
.evictable.age3 > summary { border-color: color-mix(in srgb, var(--evictable) 25%, var(--card)); }
.node code { flex: 1; min-width: 0; overflow: hidden; text-overflow: ellipsis; white-space: nowrap; font-size: .9rem; }
.node[open] > summary { background: var(--hover); }
.facts { flex: none; display: flex; gap: .9rem; white-space: nowrap; }
.facts span { min-width: 5.4rem; text-align: right; }
.facts .reused { color: var(--text); }
.tag { color: var(--protected); }
.key { margin: 0 .3rem -.4rem; font-size: .9rem; color: var(--quiet); }
.node p { margin: .4rem 0 .2rem .85rem; }
pre {
  margin: 0 0 .6rem .85rem; padding: .6rem .8rem; border: 1px solid var(--line); border-radius: .4rem;
  white-space: pre-wrap; overflow-wrap: anywhere; font-size: .85rem; max-height: 16rem; overflow: auto;
}
.branches > summary { padding: .1rem .5rem; color: var(--quiet); font-size: .9rem; }

form { display: grid; gap: .6rem; }
form > * { min-width: 0; }
label { display: grid; gap: .2rem; font-size: .9rem; color: var(--quiet); }
input, textarea, button, select { font: inherit; color: inherit; }
input, select { height: 2.4rem; }
input, textarea, select {
  width: 100%; padding: .45rem .6rem; background: var(--ground); border: 1px solid var(--line); border-radius: .4rem;
  color: var(--text);
}
textarea { min-height: 4.6rem; resize: vertical; font-family: ui-monospace, monospace; font-size: .9rem; }
button {
  justify-self: start; padding: .45rem 1.1rem; border: 0; border-radius: .4rem; cursor: pointer;
  background: var(--link); color: var(--card); font-weight: 600;
}
.inline { display: flex; flex-wrap: wrap; align-items: end; gap: .6rem 1rem; }
.inline label { flex: 1 1 14rem; }
.meter { height: .8rem; background: var(--free); margin-top: .8rem; }
.meter i { background: var(--good); }
.answer dt { font-size: .85rem; color: var(--quiet); margin-top: .5rem; }
.answer dd { margin: 0; }
.answer pre { margin: 0; }

@media (max-width: 40rem) {
  .node > summary { display: block; padding: .3rem .5rem; }
  .node code {
    display: -webkit-box; -webkit-box-orient: vertical; -webkit-line-clamp: 2;
    white-space: normal; overflow-wrap: anywhere;
  }
  .facts span { min-width: 0; }
  .branches > ul { padding-left: .5rem; margin-left: .2rem; }
  .card { padding: .8rem .7rem; }
}
"""
