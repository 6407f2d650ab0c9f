/** The place that one looks at in the graph, and the modules that are open, stand in the address. */
import type { GraphController } from "../graph/controller";
import { openedFrom, openedText, viewpointFrom, viewpointText } from "../graph/viewpoint";
import { setQuery, url } from "../router";

/** A move stands in the address once it has come to rest. */
const SETTLED_MS = 300;

/**
 * Take over what the address says, once, and then write there what is looked at, until the result is called. Call it
 * before the graph gets its canvas. Nothing is added to the history of the browser.
 */
export function linkView(graph: GraphController): () => void {
  const { searchParams } = url.peek();
  const opened = openedFrom(searchParams.get("open"));
  graph.wantedView = viewpointFrom(searchParams.get("at"));
  if (opened === "all") graph.expandAll();
  else if (opened.length > 0) graph.expanded.value = new Set(opened);
  let later: ReturnType<typeof setTimeout> | undefined;
  graph.onLooked = () => {
    clearTimeout(later);
    later = setTimeout(() => {
      const view = graph.view;
      setQuery({
        at: view === null ? null : viewpointText(view),
        open: openedText(graph.expanded.peek(), graph.groups),
      });
    }, SETTLED_MS);
  };
  return () => {
    clearTimeout(later);
    graph.onLooked = () => {};
  };
}
