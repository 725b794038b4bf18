/** A kernel in WebAssembly's text format, as build.mjs makes it: its bytes. */
declare module "*.wat" {
  const bytes: Uint8Array<ArrayBuffer>;
  export default bytes;
}
