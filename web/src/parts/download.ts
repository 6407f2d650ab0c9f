/** Hands a file that the page made to the browser's downloads. */

export function download(name: string, parts: readonly BlobPart[]): void {
  const address = URL.createObjectURL(new Blob([...parts], { type: "text/plain;charset=utf-8" }));
  const link = document.createElement("a");
  link.href = address;
  link.download = name;
  link.click();
  // The download has the address once its click was handled.
  setTimeout(() => URL.revokeObjectURL(address), 10_000);
}
