// Material's search ignores case. Here the page of exactly the name that was typed comes first, if it
// is among the results that are drawn (ten, more after scrolling): `Plan` is not `plan`, and
// `functional.dropout` is not `Dropout`. A member (`Plan.findings`) is on the page of its class.
const found = document.querySelector(".md-search-result__list");

new MutationObserver(() => {
  const query = document.querySelector(".md-search__input").value.trim();
  const typed = query.replace(/^dropblock_hooks\.|\(\)$/g, "").replaceAll(".", "/");
  const links = [...found.querySelectorAll(":scope > li > a")];
  const names = links.filter((link) => /\/(api|regularizers|observers)\//.test(link.pathname));
  const pageOf = (name) => names.find((link) => link.pathname.endsWith(`/${name}.html`));
  const own = pageOf(typed) ?? pageOf(typed.replace(/\/\w+$/, ""));
  if (own && own !== links[0]) {
    own.firstElementChild.dataset.mdScore = "Infinity"; // Enter opens the highest score
    found.prepend(own.parentElement);
  }
}).observe(found, { childList: true });
