/** The place that one looks at in the graph, and the modules that are open, stand in the address. */
import { effect, signal } from "@preact/signals";
import { plural } from "../format";
import type { GraphController } from "../graph/controller";
import { everyGroup } from "../graph/group";
import { openedFrom, openedText, viewpointFrom, viewpointText } from "../graph/viewpoint";
import { setQuery, url } from "../router";

/** A move stands in the address once it has come to rest. */
const SETTLED_MS = 300;
/** Of a field that cannot be read. */
const MOST_SHOWN = 40;

export class GraphAddress {
  /** What the address says that cannot be shown, and what is shown instead. */
  readonly notes = signal<readonly string[]>([]);
  /** Modules that the address opened, until there is a layout to look for them in. */
  #opened: readonly string[] = [];
  #later: ReturnType<typeof setTimeout> | undefined;

  constructor(private readonly graph: GraphController) {}

  /**
   * Take over what the address says, now and when the browser goes back or forward, and otherwise write there what is
   * looked at, until the result is called. Call it before the graph gets its canvas. Nothing is added to the history.
   */
  attach(): () => void {
    this.#adopt();
    this.graph.onLooked = () => this.#settle();
    const onMove = () => this.#goTo();
    addEventListener("popstate", onMove);
    // A link to an operator of this graph has no place in it: what is looked at from then on is written anew.
    const leave = effect(() => {
      url.value;
      this.#settle();
    });
    return () => {
      leave();
      removeEventListener("popstate", onMove);
      clearTimeout(this.#later);
      this.graph.onLooked = () => {};
    };
  }

  dismiss(): void {
    this.notes.value = [];
  }

  /** What the address opens; null: it names no module. */
  #adopt(): readonly string[] | "all" | null {
    const { searchParams } = url.peek();
    const [at, open] = [searchParams.get("at"), searchParams.get("open")];
    const [view, opened] = [viewpointFrom(at), openedFrom(open)];
    this.graph.wantedView = view;
    this.#opened = opened === null || opened === "all" ? [] : opened;
    const notes = [];
    if (at !== null && view === null)
      notes.push(`The address names no place in the graph (at=${cut(at)}): all of it is shown.`);
    if (opened === null) notes.push(`The modules to open cannot be read (open=${cut(open ?? "")}).`);
    this.notes.value = notes;
    if (opened === "all") this.graph.expandAll();
    else if (opened !== null && opened.length > 0) this.graph.expanded.value = new Set(opened);
    return open === null ? null : opened;
  }

  /** The browser went back or forward. */
  #goTo(): void {
    const opened = this.#adopt();
    if (this.graph.wantedView === null) this.graph.fit();
    if (opened !== "all") this.graph.setExpanded(new Set(opened ?? []));
  }

  #settle(): void {
    clearTimeout(this.#later);
    this.#later = setTimeout(() => this.#write(), SETTLED_MS);
  }

  #write(): void {
    const { graph } = this;
    if (graph.layout === null || graph.wantedView !== null || graph.busy.peek()) return;
    this.#forgetUnknown();
    const view = graph.view;
    setQuery({
      at: view === null ? null : viewpointText(view),
      open: openedText(graph.expanded.peek(), graph.groups),
    });
  }

  /** Modules of another graph, as of a link to a job that was changed since. */
  #forgetUnknown(): void {
    const known = new Set(everyGroup(this.graph.groups).map((group) => group.id));
    const unknown = this.#opened.filter((id) => !known.has(id));
    this.#opened = [];
    if (unknown.length === 0) return;
    const text = `${plural(unknown.length, "module")} that the address opens ${unknown.length === 1 ? "is" : "are"} not in this graph: ${cut(unknown.join(", "))}.`;
    this.notes.value = [...this.notes.peek(), text];
    this.graph.setExpanded(new Set([...this.graph.expanded.peek()].filter((id) => known.has(id))));
  }
}

/** The beginning of what a person may have pasted. */
export const cut = (text: string): string => (text.length > MOST_SHOWN ? `${text.slice(0, MOST_SHOWN)}…` : text);
