/** Keys of the graph's canvas: along the uses of a chosen operator, from box to box, and what a screen reader says. */
import { signal } from "@preact/signals";
import type { TargetedKeyboardEvent } from "preact";
import { plural } from "../format";
import type { GraphController } from "../graph/controller";
import { opOfBox, shownIn, usesIn } from "../graph/uses";
import { along, beside, placeText, type Walked, walkedText } from "../graph/walk";
import { setQuery } from "../router";

const ARROWS: Readonly<Record<string, readonly [number, number]>> = {
  ArrowLeft: [-1, 0],
  ArrowRight: [1, 0],
  ArrowUp: [0, -1],
  ArrowDown: [0, 1],
};

export class GraphKeys {
  /** What was gone to, for those who do not see it. */
  readonly said = signal("");
  #last: Walked | null = null;

  constructor(private readonly graph: GraphController) {}

  onKey(event: TargetedKeyboardEvent<HTMLCanvasElement>): void {
    const arrow = ARROWS[event.key];
    const middle = [event.currentTarget.clientWidth / 2, event.currentTarget.clientHeight / 2] as const;
    if (arrow !== undefined) {
      if (event.shiftKey || !this.#walk(...arrow)) this.#step(...arrow);
    } else if (event.key === "Enter" || event.key === " ") toggleSelected(this.graph);
    else if (event.key === "+" || event.key === "=") this.graph.zoom(1.25, ...middle);
    else if (event.key === "-") this.graph.zoom(1 / 1.25, ...middle);
    else return;
    event.preventDefault();
  }

  #step(dx: number, dy: number): void {
    this.graph.step(dx, dy);
    linkSelection(this.graph);
    const box = this.graph.layout?.boxes[this.graph.selected];
    if (box === undefined) return;
    this.said.value =
      box.op === null ? `${box.group.label}, ${plural(box.group.members.length, "operator")}` : box.op.name;
  }

  /** ← to what the chosen operator waits for, → to what waits for it, ↑ ↓ to the others of these. False: none is chosen. */
  #walk(dx: number, dy: number): boolean {
    const { layout, store } = this.graph;
    const [document, op] = [store.drawnDocument.value, this.#chosen()];
    if (layout === null || document === null || op === null) return false;
    const isShown = shownIn(layout);
    const next =
      dx !== 0
        ? along(document, op, dx < 0 ? "producers" : "consumers", isShown, this.#last)
        : beside(document, op, dy < 0 ? -1 : 1, isShown, this.#last);
    if (next === null) return false;
    this.#last = next;
    this.said.value = walkedText(document, next);
    if (next.op === op) return true;
    this.graph.reveal(next.op);
    if (store.stage.value === null) setQuery({ op: String(next.op) });
    return true;
  }

  /** Of operators that share a box the one that was gone to. */
  #chosen(): number | null {
    const { layout, selected } = this.graph;
    const last = this.#last?.op;
    const isThere = last !== undefined && layout?.boxOfOp[last] === selected && layout.boxes[selected]?.op !== null;
    return isThere ? last : opOfBox(layout, selected);
  }

  /** Where arrow keys lead from the chosen operator; null: none is chosen, and they go from box to box. */
  ways(): Ways | null {
    const { layout, store } = this.graph;
    const [document, op] = [store.drawnDocument.value, this.#chosen()];
    const found = op === null ? undefined : document?.ops[op];
    if (layout === null || document === null || op === null || found === undefined) return null;
    const { producers, consumers } = usesIn(document, layout, op);
    const last = this.#last?.op === op && this.#last.count > 1 ? this.#last : null;
    const place = last === null ? null : placeText(document, last);
    return { name: found.name, producers: producers.length, consumers: consumers.length, place };
  }
}

export interface Ways {
  readonly name: string;
  readonly producers: number;
  readonly consumers: number;
  /** Which of the others it is that ↑ and ↓ go through; null if none were gone among. */
  readonly place: string | null;
}

export function toggleSelected(graph: GraphController): void {
  const box = graph.layout?.boxes[graph.selected];
  if (box !== undefined) graph.toggle(box.group.id);
}

/** The address names an operator; a group that is selected is a state of the page only. */
export function linkSelection(graph: GraphController): void {
  if (graph.store.stage.value !== null) return; // its operators have other numbers
  const op = opOfBox(graph.layout, graph.selected);
  setQuery({ op: op === null ? null : String(op) });
}
